"""`paceline doctor`: what a machine has and how fast it is, how fast the network to others is, and what follows."""
