"""What ranks tell one another outside of collectives, through the rendezvous store."""
