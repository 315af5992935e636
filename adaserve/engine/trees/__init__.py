"""Candidate trees: their shape, their attention layout, their verification."""
