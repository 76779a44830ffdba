"""The master of a parameter-server job: who has which minibatch, which servers and workers run, and cuts. No torch."""
