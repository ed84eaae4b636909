"""Search path."""
