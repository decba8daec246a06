//! Draws runs as SVG: a panel for each policy, all with the same axes.
//!
//! Written out plainly: what is needed is lines, two axes and words.

use std::fmt::Write;

use balloon::MIB;
use balloon::sim::Point;

/// A line of the plot: what it is, its colour, and what of a point it shows. Colours that are told apart by those who do not
/// see red and green as others do (Okabe and Ito).
type Curve = (&'static str, &'static str, fn(&Point) -> u64);

const CURVES: [Curve; 4] = [
    ("held", "#0072b2", |point| point.held_bytes),
    ("used", "#000000", |point| point.used_bytes),
    ("available", "#009e73", |point| point.available_bytes),
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
    let most =
        panels.iter().flat_map(|(_, points)| points).flat_map(|point| CURVES.map(|curve| curve.2(point)));
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

fn panel(out: &mut String, label: &str, points: &[Point], y: u64, duration_ms: u64, most_bytes: u64) {
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
        let _ = writeln!(out, "<text x=\"-6\" y=\"{}\" text-anchor=\"end\">{}</text>", at + 4.0, size(bytes));
    }
    for ms in ticks(duration_ms, time_step(duration_ms)) {
        let at = along(ms, duration_ms);
        let y = PLOT_HEIGHT + 16;
        let _ = writeln!(out, "<text x=\"{at}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", time(ms));
    }
    for (name, colour, value) in CURVES {
        let mut path = String::new();
        for (point, index) in points.iter().zip(0..) {
            let command = if index == 0 { 'M' } else { 'L' };
            let (x, y) = (along(point.at.0, duration_ms), up(value(point), most_bytes));
            let _ = write!(path, "{command}{x} {y}");
        }
        let _ = writeln!(
            out,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"><title>{name}</title></path>"
        );
    }
    let _ = writeln!(out, "<path d=\"M0 0V{PLOT_HEIGHT}H{PLOT_WIDTH}\" fill=\"none\" stroke=\"#000000\"/>");
    out.push_str("</g>\n");
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

fn size(bytes: u64) -> String {
    match bytes / MIB {
        0 => "0".to_owned(),
        mib if mib.is_multiple_of(1024) => format!("{} GiB", mib / 1024),
        mib => format!("{mib} MiB"),
    }
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
        Point { at: TimeMs(at_s * 1000), used_bytes: mib * MIB, held_bytes: 1024 * MIB, ..Point::default() }
    }

    #[test]
    fn axes_have_round_marks_and_not_too_many() {
        for duration_ms in [1_000, 15_000, 900_000, 3_600_000, 86_400_000, 31_536_000_000, 315_360_000_000] {
            let marks = ticks(duration_ms, time_step(duration_ms)).count();
            assert!((2..=9).contains(&marks), "{marks} for {duration_ms}");
        }
        for mib in [1, 100, 384, 512, 5_000, 70_000] {
            let marks = ticks(mib * MIB, size_step(mib * MIB)).count();
            assert!((3..=5).contains(&marks), "{marks} for {mib}");
        }
        assert_eq!([0, 512, 2048].map(|mib| size(mib * MIB)), ["0", "512 MiB", "2 GiB"]);
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
        assert!(svg.contains("M0 140L430 70L860 0"), "{svg}");
        // Held: along the upper edge.
        assert!(svg.contains("M0 0L430 0L860 0"));
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
