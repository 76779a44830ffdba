"""One file for each way to compress a program, behind one seam (`contract.py`)."""
