"""Pictures that the study trains on, as sources that ddm-ray knows once this package is installed."""
