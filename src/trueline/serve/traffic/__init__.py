"""Which version a request goes to: rollouts, canaries, shadows."""
