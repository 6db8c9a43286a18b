"""What pipeline stages tell each other before their first activations."""
