"""What a model costs to serve: prefill and decode by the same operators as training, under the loads people measure."""

from shardwise.plan.serving.inference import predict_inference, serve

__all__ = ["predict_inference", "serve"]
