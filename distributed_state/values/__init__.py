"""Values and their forms: keys, codec, encryption, journal. Law: nothing here does I/O."""
