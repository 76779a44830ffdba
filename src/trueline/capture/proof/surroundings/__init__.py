"""Does the answer depend on the process, the machine or the thread? What code reads is replayed in another one."""
