"""Packs images and text into tar shards with an index, and checks what was packed."""
