"""One way to time an op: beside its floor, its peers, and under one protocol for all of them."""
