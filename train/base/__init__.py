"""What all of the train layer shares: errors, states, reports."""
