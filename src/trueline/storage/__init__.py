"""Local files and object stores: listing, ranges, caches, places for checkpoints."""
