"""What a step is made of: its parts and their times, the ranks beside one another, rates, and goodput."""
