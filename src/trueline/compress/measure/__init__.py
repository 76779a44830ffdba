"""What a candidate answers, how fast it is, how large it is, and whether it is compressed at all."""
