"""What a request asks for and what it got: classes, traces, metrics, books, the live page."""
