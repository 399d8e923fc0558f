"""ninfer on Ray Serve: replicas behind one address, conversations routed to the replica that holds their prefix."""
