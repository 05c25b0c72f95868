"""Who answers a strategy: real processes, or a simulator."""
