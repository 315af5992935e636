"""``adaserve bench fleet``: whether what replicas say about themselves is true."""
