//! gnuplot script that draws the picture.

use super::narrator::Event;
use super::prometheus::Range;
use super::table::{OTHER_VM, THIN_VM, VM};

/// Minimum distance between event names, as a fraction of the time axis. Closer names would
/// overlap.
const NAME_SPACING: f64 = 0.034;

/// Returns the script. gnuplot runs it in the folder that contains timeline.csv.
pub(super) fn script(range: &Range, events: &[Event]) -> String {
    let times: Vec<f64> = events.iter().map(|event| event.elapsed_s).collect();
    let names_at = spread(&times, range.len_s() as f64);
    let marks = events.iter().zip(names_at).enumerate();
    let marks: String =
        marks.map(|(index, (event, name_at))| mark(index + 1, event, name_at)).collect();
    include_str!("timeline.gnuplot")
        .replace("@END@", &range.len_s().to_string())
        .replace("@MARKS@", &marks)
        .replace("@VM@", VM)
        .replace("@OTHER_VM@", OTHER_VM)
        .replace("@THIN_VM@", THIN_VM)
}

/// Returns positions for the names of events at these times, in the same order. Names do not
/// overlap. They are on the time axis if there is room, and otherwise near their times.
fn spread(times_s: &[f64], axis_s: f64) -> Vec<f64> {
    let spacing_s = axis_s * NAME_SPACING;
    // 1. Move names to the right, away from their predecessors.
    let mut positions_s = times_s.to_vec();
    for next in 1..positions_s.len() {
        positions_s[next] = positions_s[next].max(positions_s[next - 1] + spacing_s);
    }
    // 2. Move names back from the end of the axis, where several events may be close together.
    let mut max_s = axis_s;
    for position_s in positions_s.iter_mut().rev() {
        *position_s = position_s.min(max_s);
        max_s = *position_s - spacing_s;
    }
    positions_s
}

/// Draws a line through all panels to the event's name above the top panel. The line passes behind
/// that panel's title.
fn mark(number: usize, event: &Event, name_at: f64) -> String {
    let at = event.elapsed_s;
    let [past, lead] = [number + PAST_TITLE_FROM, number + LEADS_FROM];
    // gnuplot interprets quotes and backslashes in a string. Event texts are our own and need
    // neither.
    let label: String = event.text.chars().filter(|c| !matches!(c, '"' | '\\')).collect();
    let style = "nohead back lw 1 lc rgb '#999999' dt 3";
    format!(
        "set arrow {number} from {at:.2}, graph 0 to {at:.2}, graph 1 {style}\n\
         set arrow {past} from {at:.2}, graph 1 to {at:.2}, screen top(0) + 0.026 {style}\n\
         set arrow {lead} from {at:.2}, screen top(0) + 0.026 to {name_at:.2}, screen top(0) + 0.036 {style}\n\
         set label {number} \"{label}\" at {name_at:.2}, screen top(0) + 0.041 rotate by 40 left noenhanced \
         font ',9' tc rgb '#333333'\n"
    )
}

/// Arrows with higher numbers are in the top panel only. timeline.gnuplot removes them after
/// drawing it.
const PAST_TITLE_FROM: usize = 100;
const LEADS_FROM: usize = 200;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_are_apart_and_on_the_axis() {
        assert!(spread(&[], 100.0).is_empty());
        assert_eq!(spread(&[5.0, 50.0], 100.0), [5.0, 50.0]);
        assert_eq!(spread(&[5.0, 5.5, 30.0], 100.0), [5.0, 8.4, 30.0]);
        // Names at the end move left to make room. A name that is far enough away does not move.
        let positions = spread(&[40.0, 98.0, 99.0, 100.0], 100.0);
        for (position, expected) in positions.iter().zip([40.0, 93.2, 96.6, 100.0]) {
            assert!((position - expected).abs() < 1e-9, "{positions:?}");
        }
    }

    #[test]
    fn an_event_is_marked_and_nothing_is_left_to_fill_in() {
        let range = Range { start_s: 1000, end_s: 1100 };
        let time = Duration::ZERO;
        let event = |elapsed_s, text: &str| Event { time, elapsed_s, text: text.to_owned() };
        let script = script(&range, &[event(5.0, "one"), event(5.5, "a \"two\"")]);
        assert!(script.contains("set label 1 \"one\" at 5.00,"), "{script}");
        assert!(script.contains("set label 2 \"a two\" at 8.40,"), "{script}");
        assert!(!script.contains('@'), "{script}");
    }

    /// gnuplot fails if a panel has no points, for example after a demo that failed early.
    #[test]
    fn every_panel_has_points_without_data() {
        let script = script(&Range { start_s: 1000, end_s: 1100 }, &[]);
        let panels: Vec<&str> = script.lines().filter(|line| line.starts_with("plot ")).collect();
        assert_eq!(panels.len(), 5);
        assert!(panels.iter().all(|panel| panel.starts_with("plot 0 with lines")), "{panels:?}");
    }
}
