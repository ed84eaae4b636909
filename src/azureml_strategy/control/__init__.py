"""Communication between ranks outside of collectives, through the rendezvous store."""
