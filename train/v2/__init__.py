"""Where programs written for Ray look for names of its second train layer; there is one here."""
