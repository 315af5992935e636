"""``adaserve bench learn``: what learning gains, on a real server and on its own."""
