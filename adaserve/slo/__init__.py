"""What a request asks for and what it got: classes, traces, metrics, the ledger, the live page."""
