"""Requests and their answers, as `core.workflows` defines them for every front end."""

from genserve.core.workflows import (
    InvokeRequest,
    LoraUse,
    Preview,
    Progress,
    Result,
    Update,
    WorkflowClient,
    WorkflowInfo,
)

__all__ = [
    "InvokeRequest",
    "LoraUse",
    "Preview",
    "Progress",
    "Result",
    "Update",
    "WorkflowClient",
    "WorkflowInfo",
]
