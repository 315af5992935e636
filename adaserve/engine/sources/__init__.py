"""What proposes candidate trees."""
