"""What is known about models and drafts before they are loaded."""
