"""What the servers of a parameter server and the workers' lines to them do. They ask only a node, as strategies do."""
