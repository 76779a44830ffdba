"""Engines start, kill and watch single processes; everything elastic is above them."""
