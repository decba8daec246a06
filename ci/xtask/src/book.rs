//! Builds the book: HTML that mdBook generates from the pages in docs/.

use anyhow::Result;

use crate::checkout::Checkout;
use crate::jobs;
use crate::programs;
use crate::tools::MDBOOK;

/// Builds the book in target/book. Returns false if mdBook rejects a page or the table of contents.
pub(crate) fn build(checkout: &Checkout) -> Result<bool> {
    let mut mdbook = programs::user(&MDBOOK.path(checkout)?);
    mdbook.arg("build").arg(checkout.root().join("docs"));
    Ok(jobs::status(&mut mdbook)?.success())
}
