"""The figures of papers, redrawn for print: reported beside obtained, with the numbers of each as CSV."""
