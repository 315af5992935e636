"""What is known of models and drafts before they are loaded."""
