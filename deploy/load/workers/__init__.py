"""What workers cost, and what becomes of their sessions when they die. Law: they are started as users start them."""
