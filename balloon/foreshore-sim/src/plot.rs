//! Draws runs over time. Each policy has one panel for its memory and one for its stalls. The axes
//! are the same in all panels.

use balloon::sim::{Extremes, Point};
use plotters::coord::Shift;
use plotters::prelude::*;

/// Font family of all texts.
pub(super) const FONT_FAMILY: &str = "sans-serif";

const WIDTH: i32 = 1000;
/// Width of the tick marks and names of the vertical axes.
const LEFT: i32 = 72;
/// Part of `LEFT` that is left empty, because plotters rotates the name around its upper corner.
const MARGIN: i32 = 8;
const RIGHT: i32 = 28;
const HEADER: i32 = 84;
/// Height of a policy's caption.
const CAPTION: i32 = 26;
const MEMORY: i32 = 160;
const GAP: i32 = 10;
const STALLS: i32 = 56;
/// Height of the tick marks and labels of the time axis.
const TIMES: i32 = 34;
const PANEL: i32 = CAPTION + MEMORY + GAP + STALLS + TIMES;

/// Number of intervals into which a run is divided. Each is at least one pixel wide.
pub(crate) const INTERVALS: u64 = (WIDTH - LEFT - RIGHT - 1) as u64;

/// Maximum number of policies in a plot. With this number, the pixels of the image take 86 MB.
pub(crate) const MAX_PANELS: usize = 100;

const GIB: f64 = (1u64 << 30) as f64;

/// A quantity that is drawn in the memory panel.
struct Curve {
    name: &'static str,
    color: RGBColor,
    value: fn(&Point) -> Extremes,
}

// The colors are those of Okabe and Ito, which people with color blindness can distinguish. Areas
// are pale, so that lines are visible on top of them.

/// Areas in the order in which they are drawn. The second area covers the lower part of the first.
const AREAS: [Curve; 2] = [
    Curve { name: "PM", color: RGBColor(247, 215, 150), value: |point| point.total_bytes },
    Curve { name: "DRAM", color: RGBColor(173, 216, 240), value: |point| point.dram_bytes },
];

const LINES: [Curve; 3] = [
    Curve { name: "available", color: RGBColor(0, 158, 115), value: |point| point.available_bytes },
    Curve { name: "used", color: RGBColor(0, 0, 0), value: |point| point.used_bytes },
    Curve { name: "in swap", color: RGBColor(213, 94, 0), value: |point| point.swapped_bytes },
];

const STALL_NAME: &str = "stalled";
const STALL_COLOR: RGBColor = RGBColor(204, 121, 167);
const AXIS_COLOR: RGBColor = RGBColor(90, 90, 90);

/// Possible steps of the time axis, in milliseconds.
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

/// Basis points in the whole time. Stalls are measured in this unit, which is a hundredth of a
/// percent.
const BASIS_POINTS: u64 = 10_000;
/// Possible upper ends of the stall axis.
const STALL_ENDS: [u64; 7] = [100, 200, 500, 1_000, 2_000, 5_000, BASIS_POINTS];

/// A plot: the title of a run, and its values over time under each policy.
pub(crate) struct Plot {
    /// Workload and duration.
    pub(crate) title: String,
    /// Memory and swap of the guest.
    pub(crate) subtitle: String,
    pub(crate) duration_ms: u64,
    pub(crate) panels: Vec<Panel>,
}

/// Run of one VM under one policy.
pub(crate) struct Panel {
    pub(crate) policy: String,
    /// Length of an interval. The last interval ends with the run.
    pub(crate) interval_ms: u64,
    /// One point for each interval.
    pub(crate) points: Vec<Point>,
}

impl Panel {
    fn stall_s(&self) -> f64 {
        self.points.iter().map(|point| point.stall_us).sum::<u64>() as f64 / 1e6
    }

    /// Returns the intervals with stalls, each with its start, its end, and the share of the time
    /// for which tasks waited.
    fn stalls(&self, duration_ms: u64) -> impl Iterator<Item = (u64, u64, u64)> {
        let stalled = self.points.iter().filter(|point| point.stall_us > 0);
        stalled.map(move |point| {
            let begin_ms = point.at.0;
            let end_ms = (begin_ms + self.interval_ms).min(duration_ms);
            let interval_us = end_ms.saturating_sub(begin_ms).max(1) * 1000;
            let part = (point.stall_us.saturating_mul(BASIS_POINTS)).div_ceil(interval_us);
            (begin_ms, end_ms, part)
        })
    }
}

impl Plot {
    /// Returns the width and height in pixels.
    pub(crate) fn size(&self) -> (u32, u32) {
        let height = HEADER as u32 + PANEL as u32 * self.panels.len() as u32;
        (WIDTH as u32, height)
    }

    fn most_bytes(&self) -> u64 {
        let points = self.panels.iter().flat_map(|panel| &panel.points);
        let curves = || AREAS.iter().chain(&LINES);
        let most = points.flat_map(|point| curves().map(|curve| (curve.value)(point).most));
        most.max().unwrap_or(0).max(1)
    }

    fn stall_end(&self) -> u64 {
        let stalls = self.panels.iter().flat_map(|panel| panel.stalls(self.duration_ms));
        let most = stalls.map(|(_, _, part)| part).max().unwrap_or(0);
        STALL_ENDS.into_iter().find(|end| most <= *end).unwrap_or(BASIS_POINTS)
    }
}

type Area<B> = DrawingArea<B, Shift>;

/// Draws the plot on an area of the plot's size.
pub(super) fn draw<B: DrawingBackend>(area: &Area<B>, plot: &Plot) -> DrawResult<(), B> {
    area.fill(&WHITE)?;
    let (header, panels) = area.split_vertically(HEADER);
    draw_header(&header, plot)?;
    let scale = Scale {
        duration_ms: plot.duration_ms.max(1),
        most_bytes: plot.most_bytes(),
        stall_end: plot.stall_end(),
    };
    for (area, panel) in panels.split_evenly((plot.panels.len(), 1)).iter().zip(&plot.panels) {
        draw_panel(area, panel, &scale)?;
    }
    area.present()
}

/// Upper ends of the axes, which all panels share.
struct Scale {
    duration_ms: u64,
    most_bytes: u64,
    stall_end: u64,
}

fn text(size: u32) -> TextStyle<'static> {
    (FONT_FAMILY, size).into_text_style(&(1, 1)).color(&BLACK)
}

/// Draws the title and the legend.
fn draw_header<B: DrawingBackend>(area: &Area<B>, plot: &Plot) -> DrawResult<(), B> {
    area.draw_text(&plot.title, &text(22), (LEFT, 6))?;
    area.draw_text(&plot.subtitle, &text(15).color(&AXIS_COLOR), (LEFT, 34))?;
    let areas = AREAS.iter().rev().map(|curve| (curve.name, curve.color, true));
    let lines = LINES.iter().map(|curve| (curve.name, curve.color, false));
    let entries = areas.chain(lines).chain([(STALL_NAME, STALL_COLOR, true)]);
    for ((name, color, is_area), x) in entries.zip((LEFT..).step_by(110)) {
        let (top, bottom) = if is_area { (59, 72) } else { (64, 67) };
        area.draw(&Rectangle::new([(x, top), (x + 22, bottom)], color.filled()))?;
        area.draw_text(name, &text(15), (x + 28, 59))?;
    }
    Ok(())
}

fn draw_panel<B: DrawingBackend>(
    area: &Area<B>,
    panel: &Panel,
    scale: &Scale,
) -> DrawResult<(), B> {
    let (caption, area) = area.split_vertically(CAPTION);
    let (memory, stalls) = area.split_vertically(MEMORY);
    let label = format!("Policy {}: {STALL_NAME} {:.2} s", panel.policy, panel.stall_s());
    caption.draw_text(&label, &text(17), (LEFT, 4))?;
    draw_memory(&memory, panel, scale)?;
    draw_stalls(&stalls, panel, scale)
}

fn draw_memory<B: DrawingBackend>(
    area: &Area<B>,
    panel: &Panel,
    scale: &Scale,
) -> DrawResult<(), B> {
    let end = scale.duration_ms;
    let times = (0..end).with_key_points(ticks(end, time_step(end)));
    let sizes =
        (0..scale.most_bytes).with_key_points(ticks(scale.most_bytes, size_step(scale.most_bytes)));
    let mut chart = ChartBuilder::on(area)
        .margin_left(MARGIN)
        .margin_right(RIGHT)
        .set_label_area_size(LabelAreaPosition::Left, LEFT - MARGIN)
        .build_cartesian_2d(times, sizes)?;
    let points = &panel.points;
    for Curve { color, value, .. } in &AREAS {
        let mut outline = path(points, *value, end);
        outline.extend([(end, 0), (0, 0)]);
        chart.draw_series([Polygon::new(outline, color.filled())])?;
    }
    for Curve { color, value, .. } in &LINES {
        chart.draw_series([PathElement::new(path(points, *value, end), color.stroke_width(2))])?;
    }
    // The grid is drawn last, because the areas would cover it.
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(BLACK.mix(0.12))
        .axis_style(AXIS_COLOR)
        .x_labels(0)
        .y_label_formatter(&|bytes| (*bytes as f64 / GIB).to_string())
        .label_style(text(14))
        .y_desc("memory (GiB)")
        .draw()
}

fn draw_stalls<B: DrawingBackend>(
    area: &Area<B>,
    panel: &Panel,
    scale: &Scale,
) -> DrawResult<(), B> {
    let end = scale.duration_ms;
    let times = (0..end).with_key_points(ticks(end, time_step(end)));
    let percents = (0..scale.stall_end).with_key_points(vec![0, scale.stall_end]);
    let mut chart = ChartBuilder::on(area)
        .margin_top(GAP)
        .margin_left(MARGIN)
        .margin_right(RIGHT)
        .set_label_area_size(LabelAreaPosition::Left, LEFT - MARGIN)
        .set_label_area_size(LabelAreaPosition::Bottom, TIMES)
        .build_cartesian_2d(times, percents)?;
    // The bar of a short stall ends two pixels above the axis, so that it is visible.
    let least = (scale.stall_end * 3).div_ceil(STALLS as u64);
    let bars = panel.stalls(end).map(|(begin_ms, end_ms, part)| {
        // The last interval may be narrower than a pixel.
        let begin_ms = begin_ms.min(end_ms.saturating_sub(panel.interval_ms));
        Rectangle::new([(begin_ms, 0), (end_ms, part.max(least))], STALL_COLOR.filled())
    });
    chart.draw_series(bars)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(BLACK.mix(0.12))
        .axis_style(AXIS_COLOR)
        .x_label_formatter(&|ms| time(*ms))
        .y_label_formatter(&|part| (part / 100).to_string())
        .label_style(text(14))
        .x_desc("time")
        .y_desc("stalls (%)")
        .draw()
}

/// Returns the curve through all points. At each point, it goes first to the extreme that is closer
/// to the previous value, and then to the other extreme. Peaks and dips within an interval
/// therefore keep their height.
fn path(points: &[Point], value: fn(&Point) -> Extremes, duration_ms: u64) -> Vec<(u64, u64)> {
    let mut path = Vec::new();
    let mut before: Option<u64> = None;
    for point in points {
        let Extremes { least, most } = value(point);
        let is_down = before.is_some_and(|before| before.abs_diff(most) < before.abs_diff(least));
        let (first, second) = if is_down { (most, least) } else { (least, most) };
        path.push((point.at.0, first));
        if second != first {
            path.push((point.at.0, second));
        }
        before = Some(second);
    }
    // The last interval ends at the end of the run.
    path.extend(before.map(|bytes| (duration_ms, bytes)));
    path
}

fn ticks(end: u64, step: u64) -> Vec<u64> {
    (0..=end / step).map(|index| index * step).collect()
}

/// Returns a step of the time axis that results in at most nine tick marks.
fn time_step(duration_ms: u64) -> u64 {
    let fits = |step: &u64| duration_ms / step <= 8;
    TIME_STEPS.into_iter().find(fits).unwrap_or_else(|| duration_ms.div_ceil(8))
}

/// Returns a step of the memory axis: a power of two that results in at most five tick marks.
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

#[cfg(test)]
mod tests {
    use balloon::{MIB, TimeMs};

    use super::super::image::svg;
    use super::*;

    fn point(at_s: u64, used_mib: u64) -> Point {
        Point {
            at: TimeMs(at_s * 1000),
            used_bytes: (used_mib * MIB).into(),
            dram_bytes: (512 * MIB).into(),
            total_bytes: (1024 * MIB).into(),
            ..Point::default()
        }
    }

    /// Plot of 10 s with intervals of 1 s.
    fn plot(panels: Vec<(&str, Vec<Point>)>) -> Plot {
        let panel = |(policy, points): (&str, _)| Panel {
            policy: policy.to_owned(),
            interval_ms: 1000,
            points,
        };
        Plot {
            title: "Workload <ramp>".to_owned(),
            subtitle: "guest & \"host\"".to_owned(),
            duration_ms: 10_000,
            panels: panels.into_iter().map(panel).collect(),
        }
    }

    /// Values of one attribute, from all elements with this name and color, in order.
    fn attributes<'a>(svg: &'a str, element: &str, color: RGBColor, name: &str) -> Vec<&'a str> {
        let color = format!("=\"#{:02X}{:02X}{:02X}\"", color.0, color.1, color.2);
        let elements = svg
            .lines()
            .filter(|line| line.starts_with(&format!("<{element} ")) && line.contains(&color));
        let value = |line: &'a str| {
            let (_, value) = line.split_once(&format!(" {name}=\"")).expect("an attribute");
            value.split_once('"').expect("a quotation mark").0
        };
        elements.map(value).collect()
    }

    #[test]
    fn axes_have_round_marks_and_not_too_many() {
        for duration_ms in
            [1_000, 15_000, 900_000, 3_600_000, 86_400_000, 31_536_000_000, 315_360_000_000]
        {
            let marks = ticks(duration_ms, time_step(duration_ms)).len();
            assert!((2..=9).contains(&marks), "{marks} for {duration_ms}");
        }
        for mib in [1, 100, 384, 512, 5_000, 70_000] {
            let marks = ticks(mib * MIB, size_step(mib * MIB)).len();
            assert!((3..=5).contains(&marks), "{marks} for {mib}");
        }
        assert_eq!([5_000, 120_000, 7_200_000].map(time), ["5 s", "2 min", "2 h"]);
    }

    #[test]
    fn plot_has_title_legend_and_units() {
        let svg = svg(&plot(vec![("psi,idle=3s", vec![point(0, 1)]), ("off", vec![])])).unwrap();
        let texts = [
            "Workload &lt;ramp&gt;",
            "guest &amp; &quot;host&quot;",
            "DRAM",
            "PM",
            "used",
            "available",
            "in swap",
            "stalled",
            "Policy psi,idle=3s: stalled 0.00 s",
            "Policy off: stalled 0.00 s",
            "memory (GiB)",
            "stalls (%)",
            "time",
            "10 s",
        ];
        for text in texts {
            assert!(svg.contains(&format!(">\n{text}\n</text>")), "{text} is missing");
        }
    }

    #[test]
    fn dram_and_pm_are_stacked_and_lines_are_in_place() {
        let points = vec![point(0, 0), point(5, 512), point(10, 1024)];
        let svg = svg(&plot(vec![("psi", points)])).unwrap();
        let (left, right) = (LEFT, WIDTH - RIGHT - 1);
        let (top, bottom) = (HEADER + CAPTION, HEADER + CAPTION + MEMORY - 1);
        let (middle, half) = ((left + right) / 2, (top + bottom + 1) / 2);
        let outline = |y| {
            format!(
                "{left},{y} {middle},{y} {right},{y} {right},{y} {right},{bottom} {left},{bottom} "
            )
        };
        let area = |curve: &Curve| attributes(&svg, "polygon", curve.color, "points").concat();
        assert_eq!(AREAS.each_ref().map(area), [outline(top), outline(half)]);
        let used = format!("{left},{bottom} {middle},{half} {right},{top} {right},{top} ");
        assert_eq!(attributes(&svg, "polyline", LINES[1].color, "points"), [used]);
    }

    #[test]
    fn peak_and_dip_within_a_stretch_keep_their_height() {
        let extremes = |least, most| Extremes { least: least * MIB, most: most * MIB };
        let points = [(0, 256, 256), (1, 256, 1024), (2, 512, 768), (3, 0, 256), (4, 0, 0)];
        let points = points.map(|(at_s, least, most)| Point {
            used_bytes: extremes(least, most),
            ..point(at_s, 0)
        });
        let path = path(&points, |point| point.used_bytes, 10_000);
        let expected =
            [(0, 256), (1, 256), (1, 1024), (2, 768), (2, 512), (3, 256), (3, 0), (4, 0), (10, 0)];
        assert_eq!(path, expected.map(|(at_s, mib)| (at_s * 1000, mib * MIB)));
    }

    #[test]
    fn stalls_are_parts_of_their_stretches_and_short_ones_are_visible() {
        let stalled = |at_s, stall_us| Point { stall_us, ..point(at_s, 0) };
        let points = vec![stalled(0, 500_000), stalled(1, 0), stalled(2, 10), stalled(10, 0)];
        let svg = svg(&plot(vec![("psi", points)])).unwrap();
        let heights = attributes(&svg, "rect", STALL_COLOR, "height");
        // The first element is in the legend. The axis ends at 50 %.
        assert_eq!(heights[1..], [(STALLS - 1).to_string(), "2".to_owned()]);
        assert!(svg.contains("Policy psi: stalled 0.50 s") && svg.contains(">\n50\n</text>"));
    }

    #[test]
    fn stalls_of_every_stretch_are_at_least_a_pixel_wide() {
        for duration_ms in [1_000, 86_400_001, 7_777_777] {
            let interval_ms = duration_ms / INTERVALS + 1;
            let stalled = |at| Point { at: TimeMs(at), stall_us: 1, ..Point::default() };
            let points: Vec<_> =
                (0..duration_ms).step_by(interval_ms as usize).map(stalled).collect();
            let panel = Panel { policy: "psi".to_owned(), interval_ms, points };
            let plot = Plot { duration_ms, panels: vec![panel], ..plot(Vec::new()) };
            let svg = svg(&plot).unwrap();
            let widths = attributes(&svg, "rect", STALL_COLOR, "width");
            assert_eq!(widths.len(), plot.panels[0].points.len() + 1);
            assert!(!widths.contains(&"0"), "{duration_ms}: {widths:?}");
        }
    }

    #[test]
    fn svg_is_well_formed() {
        let svg = svg(&plot(vec![("<b>\"&", vec![point(0, 1), point(1, 2)])])).unwrap();
        let (_, elements) = svg.split_once("-->").expect("the mark");
        let mut open = Vec::new();
        for tag in elements.split('<').skip(1) {
            let (tag, text) = tag.split_once('>').expect("the end of a tag");
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            assert!(!text.replace("&amp;", "").contains(" & "), "{text}");
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop().as_deref(), Some(name)),
                None if tag.ends_with('/') => {}
                None => open.push(tag.split(' ').next().unwrap_or_default().to_owned()),
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }
}
