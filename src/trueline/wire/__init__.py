"""What crosses process boundaries: the protos and their generated code (`make protos`)."""
