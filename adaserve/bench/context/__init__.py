"""`adaserve bench context`: speculation at long contexts, by requests, context and way to draft."""
