"""Communications that live ranks really make, with assistants in the place of absent members."""
