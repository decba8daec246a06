//! Draws runs as SVG: a panel for each policy, all with the same axes.
//!
//! Written out plainly: what is needed is lines, two axes and words.

use std::fmt::Write;

use balloon::MIB;
use balloon::sim::{Extremes, Point};
use foreshore_types::size::Size;

/// A line of the plot: what it is, its colour, and what of a point it shows. Colours that are told
/// apart by those who do not see red and green as others do (Okabe and Ito). Later ones are drawn
/// over earlier ones, which shine through.
type Curve = (&'static str, &'static str, fn(&Point) -> Extremes);

/// First bytes of every plot.
pub(super) const BEGIN: &str = "<svg xmlns=";

const CURVES: [Curve; 4] = [
    ("total", "#0072b2", |point| point.total_bytes),
    ("available", "#009e73", |point| point.available_bytes),
    ("used", "#000000", |point| point.used_bytes),
    ("swap", "#d55e00", |point| point.swapped_bytes),
];

const WIDTH: u64 = 960;
const PANEL: u64 = 200;
const LEFT: u64 = 80;
const RIGHT: u64 = 20;
const TOP: u64 = 34;
const BOTTOM: u64 = 26;
const PLOT_WIDTH: u64 = WIDTH - LEFT - RIGHT;
const PLOT_HEIGHT: u64 = PANEL - TOP - BOTTOM;

/// Steps of the time axis, in milliseconds.
const TIME_STEPS: [u64; 17] = [
    1_000,
    2_000,
    5_000,
    10_000,
    30_000,
    60_000,
    120_000,
    300_000,
    600_000,
    1_800_000,
    3_600_000,
    7_200_000,
    14_400_000,
    21_600_000,
    43_200_000,
    86_400_000,
    604_800_000,
];

/// The drawing of runs of so long, each with its name.
pub(crate) fn svg(panels: &[(String, Vec<Point>)], duration_ms: u64) -> String {
    let most = panels
        .iter()
        .flat_map(|(_, points)| points)
        .flat_map(|point| CURVES.map(|curve| curve.2(point).most));
    let most_bytes = most.max().unwrap_or(0).max(MIB);
    let height = PANEL * panels.len() as u64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for ((label, points), index) in panels.iter().zip(0..) {
        panel(&mut out, label, points, PANEL * index, duration_ms, most_bytes);
    }
    out.push_str("</svg>\n");
    out
}

fn panel(
    out: &mut String,
    label: &str,
    points: &[Point],
    y: u64,
    duration_ms: u64,
    most_bytes: u64,
) {
    let _ = writeln!(out, "<g transform=\"translate({LEFT} {})\">", y + TOP);
    let _ = writeln!(out, "<text x=\"0\" y=\"-14\" font-weight=\"bold\">{}</text>", escape(label));
    let mut x = PLOT_WIDTH;
    for (name, colour, _) in CURVES.iter().rev() {
        x -= 80;
        let _ = writeln!(out, "<text x=\"{x}\" y=\"-14\" fill=\"{colour}\">{name}</text>");
    }
    for bytes in ticks(most_bytes, size_step(most_bytes)) {
        let at = up(bytes, most_bytes);
        let _ = writeln!(out, "<path d=\"M0 {at}H{PLOT_WIDTH}\" stroke=\"#dddddd\"/>");
        let _ = writeln!(
            out,
            "<text x=\"-6\" y=\"{}\" text-anchor=\"end\">{}</text>",
            at + 4.0,
            Size(bytes)
        );
    }
    for ms in ticks(duration_ms, time_step(duration_ms)) {
        let at = along(ms, duration_ms);
        let y = PLOT_HEIGHT + 16;
        let _ =
            writeln!(out, "<text x=\"{at}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", time(ms));
    }
    for (name, colour, value) in CURVES {
        let path = path(points, value, duration_ms, most_bytes);
        let _ = writeln!(
            out,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" stroke-opacity=\"0.75\"><title>{name}</title></path>"
        );
    }
    let _ = writeln!(
        out,
        "<path d=\"M0 0V{PLOT_HEIGHT}H{PLOT_WIDTH}\" fill=\"none\" stroke=\"#000000\"/>"
    );
    out.push_str("</g>\n");
}

/// From point to point, at each from the extreme that is nearer to the one before to the other:
/// what went up and down within a stretch is as high and as low as it was.
fn path(
    points: &[Point],
    value: fn(&Point) -> Extremes,
    duration_ms: u64,
    most_bytes: u64,
) -> String {
    let mut path = String::new();
    let mut before = None;
    for point in points {
        let Extremes { least, most } = value(point);
        let is_down =
            before.is_some_and(|before: u64| before.abs_diff(most) < before.abs_diff(least));
        let (first, second) = if is_down { (most, least) } else { (least, most) };
        let command = if before.is_none() { 'M' } else { 'L' };
        let _ =
            write!(path, "{command}{} {}", along(point.at.0, duration_ms), up(first, most_bytes));
        if second != first {
            let _ = write!(path, "V{}", up(second, most_bytes));
        }
        before = Some(second);
    }
    // The last stretch has no end of its own.
    if !path.is_empty() {
        let _ = write!(path, "H{PLOT_WIDTH}");
    }
    path
}

/// A place on an axis, to a tenth of a pixel.
fn place(value: u64, of: u64, length: u64) -> f64 {
    (value as f64 / of.max(1) as f64 * length as f64 * 10.0).round() / 10.0
}

fn along(ms: u64, duration_ms: u64) -> f64 {
    place(ms, duration_ms, PLOT_WIDTH)
}

fn up(bytes: u64, most_bytes: u64) -> f64 {
    ((PLOT_HEIGHT as f64 - place(bytes, most_bytes, PLOT_HEIGHT)) * 10.0).round() / 10.0
}

fn ticks(end: u64, step: u64) -> impl Iterator<Item = u64> {
    (0..=end / step).map(move |index| index * step)
}

/// At most nine marks.
fn time_step(duration_ms: u64) -> u64 {
    let fits = |step: &u64| duration_ms / step <= 8;
    TIME_STEPS.into_iter().find(fits).unwrap_or_else(|| duration_ms.div_ceil(8))
}

/// A power of two: at most five marks.
fn size_step(most_bytes: u64) -> u64 {
    (most_bytes / 4).max(1).next_power_of_two()
}

fn time(ms: u64) -> String {
    match ms / 1000 {
        0 => "0".to_owned(),
        s if s.is_multiple_of(3600) => format!("{} h", s / 3600),
        s if s.is_multiple_of(60) => format!("{} min", s / 60),
        s => format!("{s} s"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use balloon::TimeMs;

    use super::*;

    fn point(at_s: u64, mib: u64) -> Point {
        let (used_bytes, total_bytes) = ((mib * MIB).into(), (1024 * MIB).into());
        Point { at: TimeMs(at_s * 1000), used_bytes, total_bytes, ..Point::default() }
    }

    #[test]
    fn axes_have_round_marks_and_not_too_many() {
        for duration_ms in
            [1_000, 15_000, 900_000, 3_600_000, 86_400_000, 31_536_000_000, 315_360_000_000]
        {
            let marks = ticks(duration_ms, time_step(duration_ms)).count();
            assert!((2..=9).contains(&marks), "{marks} for {duration_ms}");
        }
        for mib in [1, 100, 384, 512, 5_000, 70_000] {
            let marks = ticks(mib * MIB, size_step(mib * MIB)).count();
            assert!((3..=5).contains(&marks), "{marks} for {mib}");
        }
        assert_eq!([5_000, 120_000, 7_200_000].map(time), ["5 s", "2 min", "2 h"]);
    }

    #[test]
    fn a_panel_for_each_policy_with_its_curves_in_place() {
        let panels = [
            ("psi,idle<3s&".to_owned(), vec![point(0, 0), point(5, 512), point(10, 1024)]),
            ("off".to_owned(), vec![]),
        ];
        let svg = svg(&panels, 10_000);
        assert_eq!(svg.matches("<g ").count(), 2);
        assert!(svg.contains(">psi,idle&lt;3s&amp;</text>"));
        // Used: from the lower left corner over the middle to the upper right one.
        assert!(svg.contains("M0 140L430 70L860 0H860\""), "{svg}");
        // All of it: along the upper edge.
        assert!(svg.contains("M0 0L430 0L860 0H860\""));
    }

    #[test]
    fn a_burst_and_a_dip_within_a_stretch_are_drawn_to_their_ends() {
        let extremes = |least, most| Extremes { least: least * MIB, most: most * MIB };
        let points = [(0, 256, 256), (1, 256, 1024), (2, 512, 768), (3, 0, 256), (4, 0, 0)];
        let points = points.map(|(at_s, least, most)| Point {
            used_bytes: extremes(least, most),
            ..point(at_s * 2, 0)
        });
        let path = path(&points, |point| point.used_bytes, 10_000, 1024 * MIB);
        assert_eq!(path, "M0 105L172 105V0L344 35V70L516 105V140L688 140H860");
    }

    /// Every element that is opened is closed, in order, and no attribute is left open.
    #[test]
    fn it_is_well_formed() {
        let svg = svg(&[("<b>\"&".to_owned(), vec![point(0, 1), point(1, 2)])], 2_000);
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').expect("closed");
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop().as_deref(), Some(name)),
                None if tag.ends_with('/') => {}
                None => open.push(tag.split(' ').next().unwrap_or_default().to_owned()),
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }
}
