"""Which record stands at which position of an epoch, by pure arithmetic."""
