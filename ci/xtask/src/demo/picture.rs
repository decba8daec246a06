//! The picture of the metrics that Prometheus has collected.

use anyhow::Result;

use super::Demo;
use super::narrator::{EVENTS, now, seconds};
use super::prometheus::Prometheus;
use crate::checkout::{read, write};
use crate::jobs;
use crate::programs;

const FORMATS: [&str; 2] = ["svg", "png"];
/// Title that gnuplot gives to every picture.
const GNUPLOT_TITLE: &str = "<title>Gnuplot</title>";
const TITLE: &str = "<title>Foreshore: a guest's memory grows into PM and back</title>";

/// Draws the picture in the folder of the demo and shows the output of the programs. Times count
/// from the second `zero`. Returns true if all programs succeed. `demo-timeline` fails if the data
/// do not show a claim.
pub(super) fn draw(
    demo: &Demo<'_>,
    prometheus: &Prometheus,
    zero: u64,
    options: &[&str],
    mut show: impl FnMut(&[u8]) -> Result<()>,
) -> Result<bool> {
    let mut timeline = programs::user(demo.checkout.programs().join("demo-timeline"));
    timeline
        .arg(format!("127.0.0.1:{}", prometheus.port()))
        .arg(zero.to_string())
        .arg(seconds(now()?));
    timeline.arg(demo.folder.join(EVENTS)).arg(&demo.folder).args(options);
    if !jobs::stream_output(&mut timeline, &mut show)?.success() {
        return Ok(false);
    }
    for format in FORMATS {
        let mut gnuplot = programs::user("gnuplot");
        gnuplot.arg("-e").arg(format!("format='{format}'")).arg("timeline.gnuplot");
        if !jobs::stream(gnuplot.current_dir(&demo.folder), &mut show)?.success() {
            return Ok(false);
        }
    }
    let path = demo.folder.join("timeline.svg");
    write(&path, read(&path)?.replace(GNUPLOT_TITLE, TITLE))?;
    Ok(true)
}
