"""What a forward takes: models, measurements and fits, and what is learned while serving."""
