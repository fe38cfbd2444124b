"""Pictures and pages: grids of images, charts, PNG files, HTML reports. Independent of runs and models."""
