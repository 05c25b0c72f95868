"""The user's door: `Run`, its loader and its optimizer."""
