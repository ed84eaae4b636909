"""Imported first where much is imported that stays: to visit it again and again takes a quarter of that time."""

import gc

gc.disable()
