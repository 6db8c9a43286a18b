"""What differs from backend to backend: memory, order, and the classes that torch asks for."""
