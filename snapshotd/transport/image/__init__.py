"""The image channel: frames, the sender on the source, the store on the target, over gRPC or bulk connections."""
