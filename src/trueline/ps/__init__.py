"""The parameter server: embedding tables without a vocabulary and asynchronous training, each record once.

worker ──lease, commit──▶ master            which minibatch is whose, and which are done
   └────pull, push──────▶ servers           rows by id, dense parameters by name; each applies a minibatch once
"""
