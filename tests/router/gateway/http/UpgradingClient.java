import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Java's own client with its defaults: over http it offers to go on in HTTP/2. Arguments: base URL, body of a chat. */
public class UpgradingClient {
    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        String chat = arguments[1];
        HttpResponse<String> models = send(HttpRequest.newBuilder(URI.create(url + "/v1/models")));
        System.out.println(models.statusCode() + " " + models.version());
        HttpResponse<String> whole = send(post(url, chat));
        String text = whole.body().replaceAll("(?s).*\"content\":\"([^\"]*)\".*", "$1");
        System.out.println(whole.statusCode() + " " + whole.version() + " " + text);
        HttpResponse<String> stream = send(post(url, chat.replaceFirst("\\{", "{\"stream\": true, ")));
        String[] events = stream.body().trim().split("\n\n");
        System.out.println(stream.statusCode() + " " + stream.version() + " " + events[events.length - 1].substring(6));
    }

    private static HttpRequest.Builder post(String url, String body) {
        return HttpRequest.newBuilder(URI.create(url + "/v1/chat/completions"))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body));
    }

    private static HttpResponse<String> send(HttpRequest.Builder request) throws Exception {
        // A client of its own each time: the upgrade is offered with the first request of a connection.
        return HttpClient.newHttpClient().send(request.build(), HttpResponse.BodyHandlers.ofString());
    }
}
