//! The picture of the metrics that Prometheus has collected.

use std::path::Path;

use anyhow::Result;

use super::narrator::{EVENTS, now, seconds};
use crate::checkout::{Checkout, read, write};
use crate::jobs;
use crate::programs;

const FORMATS: [&str; 2] = ["svg", "png"];
/// Title that gnuplot gives to every picture.
const GNUPLOT_TITLE: &str = "<title>Gnuplot</title>";
const TITLE: &str = "<title>Foreshore: a guest's memory grows into PM and back</title>";

/// A picture in the folder of the demo.
pub struct Picture<'demo> {
    pub checkout: &'demo Checkout,
    pub folder: &'demo Path,
    /// Second that times count from.
    pub zero: u64,
}

impl Picture<'_> {
    /// Draws the picture and shows the output of the programs. Returns true if all of them succeed.
    /// `demo-timeline` fails if the data do not show a claim.
    pub fn draw(
        &self,
        port: u16,
        options: &[&str],
        mut show: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<bool> {
        let mut timeline = programs::user(self.checkout.programs().join("demo-timeline"));
        timeline.arg(format!("127.0.0.1:{port}")).arg(self.zero.to_string()).arg(seconds(now()?));
        timeline.arg(self.folder.join(EVENTS)).arg(self.folder).args(options);
        if !jobs::stream_output(&mut timeline, &mut show)?.success() {
            return Ok(false);
        }
        for format in FORMATS {
            let mut gnuplot = programs::user("gnuplot");
            gnuplot.arg("-e").arg(format!("format='{format}'")).arg("timeline.gnuplot");
            if !jobs::stream(gnuplot.current_dir(self.folder), &mut show)?.success() {
                return Ok(false);
            }
        }
        let path = self.folder.join("timeline.svg");
        write(&path, read(&path)?.replace(GNUPLOT_TITLE, TITLE))?;
        Ok(true)
    }
}
