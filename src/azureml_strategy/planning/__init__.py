"""What a run takes, holds and costs, before anything is rented."""
