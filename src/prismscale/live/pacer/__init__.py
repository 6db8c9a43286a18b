"""Who holds a live rank on a GPU back until its communications end."""
