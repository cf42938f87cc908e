"""How bytes get to another rank's memory."""
