"""Real ranks of this machine: started, watched, and their failures told in words."""
